"""A layer of the size of AlexNet's fc6, trained without other layers: the control of `megabatch study precision`.

The gradient spreads over 37,748,736 weights, so that its elements are small.  In fp16, values below 1.7e-4 have a
square of 0, and values below 3e-8 are 0.  If the elements are equal, a gradient of norm

    below 1.06 (here) and 0.039 (in a layer of 50,176 weights, as in `tiny_cnn`)   has norm 0, so no trust ratio
    below 1.8e-4 and 6.7e-6                                                        is 0

The readout is not trained.  Its weights have a standard deviation of `readout_std`.  With 1e-6 the gradient's norm is
about 3e-4.  LARS does not depend on the size of the gradient, so this should not matter.
"""

from collections import OrderedDict

from torch import nn

FEATURES, HIDDEN = 9216, 4096
CHANNELS, KERNEL = 16, 5  # of images of 28 pixels, 16 x 24 x 24 are FEATURES
STD = 0.005  # of fc6, as in NVCaffe


def fc6_alone(num_classes: int, in_channels: int, readout_std: float = 1e-6) -> nn.Module:
    network = nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(in_channels, CHANNELS, KERNEL, bias=False),
            relu=nn.ReLU(),
            flatten=nn.Flatten(),
            fc6=nn.Linear(FEATURES, HIDDEN, bias=False),
            relu6=nn.ReLU(),
            readout=nn.Linear(HIDDEN, num_classes, bias=False),
        )
    )
    nn.init.normal_(network.get_submodule("fc6").weight, std=STD)  # type: ignore[arg-type]
    nn.init.normal_(network.get_submodule("readout").weight, std=readout_std)  # type: ignore[arg-type]
    return network
