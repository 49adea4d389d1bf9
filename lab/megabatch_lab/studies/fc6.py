"""A layer as large as AlexNet's fc6, trained alone: the control of `megabatch study precision`.

37,748,736 weights share one gradient, so that each one's part is small.  In fp16 the square of what is below 1.7e-4 is
0, and what is below 3e-8 is 0 itself.  Evenly spread, in this layer and in one of 50,176 weights as `tiny_cnn` has it,
a gradient of norm

    below 1.06 and 0.039     has no norm, and so no trust ratio
    below 1.8e-4 and 6.7e-6  is gone

The readout is not trained and has weights of `readout_std`: with 1e-6 the gradient's norm is about 3e-4, which LARS, as
it does not depend on the gradient's size, should not notice.
"""

from collections import OrderedDict

from torch import nn

FEATURES, HIDDEN = 9216, 4096
CHANNELS, KERNEL = 16, 5  # of images of 28 pixels, 16 x 24 x 24 are FEATURES
STD = 0.005  # of fc6, as NVCaffe's


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
