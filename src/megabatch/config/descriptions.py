"""What each setting means: the one place from which `megabatch settings` and docs/settings.md are written.

A text is Markdown of one line, and its links are relative to docs/.  Type, bounds, choices and default are not said
here: `reference.py` takes them from the schema.
"""

MEANINGS = {
    "name": (
        "of the recipe, and of its runs: `runs/<name>-<nnn>`; up to 100 letters, digits, `_`, `-` and `.`, and no `-` "
        "or `.` first"
    ),
    "about": "one line for `megabatch recipes`",
    "seed": "of the initial weights, the order of samples, crops, flips and dropout",
    "model.name": (
        "one of ours, or your own as `package.module:factory`; `alexnet` and `alexnet_bn` take images from 39 pixels, "
        "`small_alexnet_bn` has an eighth of their channels, for 28 pixels"
    ),
    "model.options": "keyword arguments of the factory, such as `model.options.width=32`",
    "model.weights": (
        "what the model starts from: a `.safetensors`, `.pth` or `.pt` file, or the folder of another run; see "
        "[weights](use-weights.md)"
    ),
    "model.freeze": (
        'modules that are not trained and compute as in evaluation, such as `model.freeze=["conv1", "bn1", "layer1"]`'
    ),
    "model.channels_last": (
        "the memory order of images and kernels; `auto` is true for our models and false for "
        "[your own](recipes.md#your-own-model)"
    ),
    "model.compile": "`torch.compile` of the network, for training: see [GPUs](gpus.md#compile)",
    "data.source": (
        "a folder of class folders, a `.tar`, a folder of tars, a pack (see [images](data.md)); an `.npz` file, a "
        "folder of four IDX files; `fashion-mnist-10k`, `fashion-mnist`, `synthetic`, or `imagenet`, which is the "
        "folder of that name, and need not be there for a plan"
    ),
    "data.also": "further folders and tars, joined by the names of their classes",
    "data.image_size": "pixels of a side; all images are resized to it",
    "data.crop_area": (
        "a random crop takes this share of the image's area, or more; by default nothing is cropped at random"
    ),
    "data.crop_ratio": "of such a crop, width to height, at most, and its inverse at least",
    "data.center_crop": (
        "of the shorter side: the square in the middle that is seen where nothing is cropped at random. `auto` is "
        "0.875, and 1 for images that are [small](data.md#decoding) already"
    ),
    "data.crop_padding": ("zeros around an image before it is cropped back at random; fewer than `data.image_size`"),
    "data.flip": "mirrors half of the images",
    "data.train_per_class": "takes so many training images of each class, before any are held out; by default all",
    "data.validation": (
        "holds out this share of every class of the training images, and tests on it; 0 tests on the source's own test "
        "images, and `auto` does so where it has some and otherwise holds out a tenth"
    ),
    "data.validation_seed": "chooses which images are held out, and which are taken by `data.train_per_class`",
    "data.on_error": "[what to do](data.md#images-that-cannot-be-read) with images that cannot be read",
    "data.skip_limit": "of an epoch's images, that may be skipped",
    "data.max_pixels": "larger images are refused before they are decoded",
    "data.max_file_mb": "larger files, or members of a tar, are not read",
    "data.image_timeout_s": (
        "seconds to read and decode one image, after which it [cannot be read](data.md#images-that-cannot-be-read)"
    ),
    "data.synthetic.train": "training images of the `synthetic` source",
    "data.synthetic.test": "its test images",
    "data.synthetic.classes": "its classes",
    "data.synthetic.channels": "channels of its images",
    "batch.global": "samples of an optimizer step, over all ranks",
    "batch.micro": "samples of one forward and backward pass, and so of one BatchNorm; `batch.global` is a multiple",
    "optim.name": (
        "the optimizer; or your own as `package.module:function`, called with parameter groups and these settings as "
        "[`fit`'s](python.md) is"
    ),
    "optim.learning_rate": "the peak",
    "optim.head_learning_rate": "the peak of the last layer's learning rate, which follows the same schedule",
    "optim.momentum": "of `sgd` and `lars`",
    "optim.nesterov": "Nesterov's form of momentum; `lars` has no such form",
    "optim.weight_decay": "of weights; biases and normalisation layers have none",
    "optim.decay_all": (
        "biases and normalisation layers decay too, which cost AlexNet 1.3 points at 64K (Jia et al. 2018)"
    ),
    "optim.clip_norm": "longest gradient (as one vector); 0 does not clip",
    "optim.variant": "of `lars`: one of [these](recipes.md#lars); `sgd` ignores this and the next two",
    "optim.trust_coefficient": "of `lars`: how far a weight moves at a learning rate of 1, as a share of its norm",
    "optim.eps": "of `lars`: added to the gradient's norm",
    "schedule.warmup_epochs": "epochs of linear warm-up, step by step",
    "schedule.decay": "of the learning rate, after the warm-up",
    "schedule.power": "of `poly`",
    "schedule.end": "the learning rate that the decay runs towards, at most `optim.learning_rate`",
    "loss.label_smoothing": "of the cross-entropy, as torch has it",
    "comm.algorithm": (
        "the all-reduce of gradients; `auto` is the best for each bucket; `ring` is the backend's own, which rounds 16 "
        "bits at every hop; see [communication](communication.md)"
    ),
    "comm.dtype": "of gradients between hosts: `fp32` is unrounded, `fp16` turns the loss scale on",
    "comm.bucket_mb": (
        "gradients are fused into buckets of up to this size, in MiB; `auto`: 25 within one host, and between hosts "
        "whatever ends communication soonest"
    ),
    "comm.timeout_s": (
        "a rank that is stuck for so many seconds is named, and the run ends, or is [restarted](reliability.md); "
        "before the first step is done it has 600 s, and three times what anything took so far"
    ),
    "comm.timeline": (
        "every rank writes a [timeline](clusters.md#what-runs-underneath-backward) of its newest 50 steps"
    ),
    "precision.name": "the number format that is computed in: see [precision](precision.md)",
    "precision.loss_scale": "a fixed loss scale; by default a dynamic one, where gradients pass through fp16",
    "train.epochs": (
        "may be a fraction; steps = floor(epochs x samples / batch.global). Where an override leaves no room for the "
        "recipe's warm-up, the warm-up is shortened [in proportion](recipes.md#shorter-runs)"
    ),
    "train.steps": "[ends the run](recipes.md#shorter-runs) after so many steps, instead of `train.epochs`",
    "train.target_top1": "the accuracy whose time `summary.json` reports",
    "train.evaluate_every": (
        "epochs between evaluations; one follows the last step in any case, and with 0 that is the only one"
    ),
    "train.examples": (
        "pictures of the test images that the newest evaluation was most confidently wrong about, kept in the run "
        "(`mistakes.json`) for its [report](report.md); 0 keeps none"
    ),
    "checkpoint.every_steps": "steps between checkpoints",
    "checkpoint.every_minutes": (
        "minutes between checkpoints; with neither, so often that writing takes 1 % of the time"
    ),
    "checkpoint.keep": "newest checkpoints that are kept; the best is kept besides",
    "run.dir": "the run's folder",
    "run.device": "`auto` is `cuda` where there is one, else `cpu`",
    "run.threads": "threads of a rank",
    "run.decode_threads": "threads of a rank that decode images",
    "run.preempt_signal": (
        "the signal that [a batch system sends](reliability.md) before it takes the host, besides SIGTERM; the run "
        "saves and ends with 128 + its number"
    ),
    "run.compare_every": (
        "steps after which ranks [compare their weights](precision.md#ranks-that-drift-apart), as they do before "
        "checkpoints and evaluations; 0: never"
    ),
    "run.deterministic": (
        "only [deterministic algorithms](gpus.md#deterministic) of torch, cuDNN and cuBLAS; by default cuDNN's "
        "convolutions are chosen by timing, which is faster, and on CUDA a resumed run is the same to rounding only"
    ),
    "provenance": (
        "settings whose values no source gives, and what they rest on: see [provenance](recipes.md#provenance)"
    ),
}

# Where the schema has None, which is no value that a user could give: what a run takes instead.
DEFAULTS = {
    "name": "that of the file",
    "model.weights": "none: the seed decides",
    "optim.head_learning_rate": "as the others",
    "optim.nesterov": "true for `sgd` with momentum",
    "precision.loss_scale": "dynamic",
    "train.epochs": "one of both must be set",
    "train.steps": "one of both must be set",
    "run.dir": "`runs/<name>-<nnn>`",
    "run.threads": "a share of the cores",
    "run.decode_threads": "as `run.threads`",
}
