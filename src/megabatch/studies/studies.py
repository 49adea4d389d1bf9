"""The studies, as data.  Each takes the place of a claim of Jia et al. 2018 that was made on ImageNet with 2,048 GPUs.

What ImageNet at 64K and these have in common is the number of steps: 20 an epoch.
"""

from megabatch.studies.design import ArmDesign, Design
from megabatch.studies.evidence import Claim, Criterion
from megabatch.sweep.search import HELD_OUT

NESTEROV = ("optim.name=sgd",)
LARS = ("optim.name=lars", "optim.trust_coefficient=0.01")
DECAY_ALL = ("optim.decay_all=true",)

# The coarse grids of large batches.
NESTEROV_RATES = (0.3, 0.9, 2.7)
LARS_RATES = (1.5, 4.5, 13.5)

BASELINE = "Nesterov, 128"
OURS = "LARS, 3,072"


def batch(size: int) -> tuple[str, ...]:
    return (f"batch.global={size}",)


LARGE_BATCH = Design(
    name="large-batch",
    title="Do huge batches lose accuracy?",
    question=(
        "Does a batch so large that an epoch has 20 steps, as ImageNet's has at 64K, reach the accuracy of a "
        "small batch in as many epochs, with a network that was chosen as one for which few steps suffice? What "
        "does LARS add to momentum that is tuned as well, and what does decay on biases and BatchNorm cost?"
    ),
    setup=(
        "Fashion-MNIST, 60,000 training images and 10,000 test images (`apt-get install dataset-fashion-mnist`); "
        "`shallow_cnn`, 204,602 parameters, BatchNorm over 128 images; 40 epochs in every arm, 5 of them warm-up, "
        "then polynomial decay of power 2; momentum 0.9, weight decay 5e-4, label smoothing 0.1, random flips; "
        "LARS with a trust coefficient of 0.01. Learning rates are searched for coarse to fine, with 6 full runs "
        "for each arm but linear scaling, trained on 55,000 images and judged by the other 5,000. The runs that "
        "count are trained on all 60,000, with 5 seeds, and tested once, after the last epoch; nothing was chosen "
        "by test images. The network was chosen by pilots on held-out training images as one for which 781 steps "
        "suffice; [they do not for every network](../studies.md#what-they-have-shown)."
    ),
    recipe="fashion-128",
    overrides=(),
    arms=(
        ArmDesign(name=BASELINE, about="the baseline", overrides=(*batch(128), *NESTEROV), grid=(0.03, 0.09, 0.27)),
        ArmDesign(
            name="linear scaling, 3,072",
            about="Nesterov with 24 times the baseline's rate (Goyal et al. 2017)",
            overrides=(*batch(3072), *NESTEROV),
            learning_rate_of=BASELINE,
            learning_rate_times=24,
        ),
        ArmDesign(
            name="Nesterov, 3,072",
            about="tuned as well as LARS (arXiv 2102.06356)",
            overrides=(*batch(3072), *NESTEROV),
            grid=NESTEROV_RATES,
        ),
        ArmDesign(
            name="LARS with all decay, 3,072",
            about="LARS, biases and BatchNorm decay too",
            overrides=(*batch(3072), *LARS, *DECAY_ALL),
            grid=LARS_RATES,
        ),
        ArmDesign(name=OURS, about="our recipe", overrides=(*batch(3072), *LARS), grid=LARS_RATES),
        ArmDesign(
            name="Nesterov, 8,192",
            about="tuned, 7.3 steps an epoch",
            overrides=(*batch(8192), *NESTEROV),
            grid=NESTEROV_RATES,
        ),
        ArmDesign(
            name="LARS, 8,192",
            about="our recipe, 7.3 steps an epoch",
            overrides=(*batch(8192), *LARS),
            grid=LARS_RATES,
        ),
    ),
    baseline=BASELINE,
    criteria=(Criterion(arm=OURS, baseline=BASELINE, max_gap_points=0.3),),
    claims=(
        Claim(
            text="With ResNet-50 at 64K, LARS takes Jia et al. 2018 from 60.6 % to 71.9 %.",
            better=OURS,
            worse="linear scaling, 3,072",
            points=11.3,
        ),
        Claim(
            text="Nesterov momentum that is tuned as well reaches what LARS reaches (arXiv 2102.06356).",
            better=OURS,
            worse="Nesterov, 3,072",
            points=0.0,
        ),
        Claim(
            text="Without decay on biases and BatchNorm they go from 55.8 % to 57.1 % with AlexNet at 64K.",
            better=OURS,
            worse="LARS with all decay, 3,072",
            points=1.3,
        ),
    ),
    validation=HELD_OUT,
    trials=6,
    seeds=5,
)

WITH_BN5 = "AlexNet-BN"

ABLATION = Design(
    name="ablation",
    title="What are a BatchNorm behind pool5, and no decay on biases and BatchNorm, worth?",
    question=(
        "Jia et al. 2018 saw the variance of pool5's output grow with iterations, put a BatchNorm behind it, and "
        "took biases and BatchNorm out of the decay. What does each of the two do for a small AlexNet-BN?"
    ),
    setup=(
        "The 10,000 + 2,000 images of Fashion-MNIST that come with megabatch; `small_alexnet_bn`, an eighth of "
        "AlexNet-BN's channels; batch 512, 20 steps an epoch, BatchNorm over 128 images; LARS with a trust "
        "coefficient of 0.01, momentum 0.9, weight decay 5e-4, label smoothing 0.1, random flips and shifts by a "
        "pixel; 30 epochs, 5 of them warm-up, polynomial decay of power 2. The learning rate of each arm is "
        "searched for coarse to fine, 6 full runs each, judged by 830 of the training images, on which they were "
        "not trained. The runs that count are trained on all 10,000 with 3 seeds. Variance is that of pool5's "
        "output over 512 training images, 128 at a time."
    ),
    recipe="fashion",
    overrides=(
        "model.name=small_alexnet_bn",
        "batch.global=512",
        "batch.micro=128",
        *LARS,
        "schedule.warmup_epochs=5",
        "train.epochs=30",
    ),
    arms=(
        ArmDesign(
            name=WITH_BN5,
            about="BatchNorm behind pool5, decay on weights alone",
            overrides=(),
            grid=(0.3, 0.9, 2.7, 8.1),
        ),
        ArmDesign(
            name="without BN5",
            about="nothing between pool5 and fc6",
            overrides=("model.options={pool5_norm=false}",),
            grid=(0.3, 0.9, 2.7, 8.1),
        ),
        ArmDesign(
            name="decay on all", about="biases and BatchNorm decay too", overrides=DECAY_ALL, grid=(0.3, 0.9, 2.7, 8.1)
        ),
    ),
    baseline=WITH_BN5,
    claims=(
        Claim(
            text=(
                "With AlexNet at 64K, Jia et al. 2018 reach 57.1 % without decay on biases and BatchNorm, and 58.7 % "
                "with AlexNet-BN, which has BatchNorm in place of local response normalisation, and behind pool5."
            ),
            better=WITH_BN5,
            worse="without BN5",
            points=1.6,
        ),
        Claim(
            text="Decay on biases and BatchNorm cost them 1.3 points there.",
            better=WITH_BN5,
            worse="decay on all",
            points=1.3,
        ),
    ),
    validation=HELD_OUT,
    trials=6,
    seeds=3,
    final_overrides=("checkpoint.every_steps=20", "checkpoint.keep=1000"),
    layer="pool5",
)

FP32 = "fp32"
DYNAMIC = "fp16, dynamic scale"

PRECISION = Design(
    name="precision",
    title="Do 16 bits lose accuracy?",
    question=(
        "Does training in 16 bits with fp32 master weights reach the accuracy of fp32, with a fixed loss scale "
        "and with a dynamic one? And what becomes of it if LARS is computed in fp16, of which Jia et al. "
        "2018 warn?"
    ),
    setup=(
        "The 10,000 + 2,000 images of Fashion-MNIST that come with megabatch; `tiny_cnn` of width 8, 64 hidden "
        "units; batch 512, 20 steps an epoch, BatchNorm over 128 images; LARS with a trust coefficient of 0.01, "
        "momentum 0.9, weight decay 5e-4, label smoothing 0.1, random flips; 15 epochs, 3 of them warm-up, "
        "polynomial decay of power 2. The learning rate was searched for in fp32, coarse to fine, 8 full runs "
        "judged by 830 of the training images, on which they were not trained, and is the same in all arms; so "
        "are the seeds, so that a seed begins with the same weights and sees the same images in every arm."
    ),
    recipe="fashion",
    overrides=(
        "model.name=tiny_cnn",
        "model.options={width=8, hidden=64}",
        "data.crop_padding=0",
        "batch.global=512",
        "batch.micro=128",
        *LARS,
        "schedule.warmup_epochs=3",
        "train.epochs=15",
    ),
    arms=(
        ArmDesign(name=FP32, about="the baseline", overrides=("precision.name=fp32",), grid=(0.3, 0.9, 2.7, 8.1)),
        ArmDesign(
            name=DYNAMIC,
            about="fp16, fp32 master weights, a dynamic loss scale",
            overrides=("precision.name=fp16",),
            learning_rate_of=FP32,
        ),
        ArmDesign(
            name="fp16, fixed scale",
            about="fp16, fp32 master weights, a loss scale of 1,000 (NVCaffe's for AlexNet-BN)",
            overrides=("precision.name=fp16", "precision.loss_scale=1000"),
            learning_rate_of=FP32,
        ),
        ArmDesign(
            name="bf16",
            about="bf16, fp32 master weights, no loss scale",
            overrides=("precision.name=bf16",),
            learning_rate_of=FP32,
        ),
        ArmDesign(
            name="LARS in fp16",
            about="the control: fp16, and weights, norms, trust ratios and momentum in fp16 too",
            overrides=("precision.name=fp16", "optim.name=lars_in_fp16"),
            learning_rate_of=FP32,
        ),
    ),
    baseline=FP32,
    criteria=(
        Criterion(arm=DYNAMIC, baseline=FP32, max_gap_points=0.3),
        Criterion(arm="fp16, fixed scale", baseline=FP32, max_gap_points=0.3),
    ),
    claims=(
        Claim(
            text="Jia et al. 2018 compute LARS in fp32, because in fp16 values become 0 and training stalls.",
            better=FP32,
            worse="LARS in fp16",
        ),
    ),
    validation=HELD_OUT,
    trials=8,
    seeds=5,
)

STUDIES = {design.name: design for design in (LARGE_BATCH, ABLATION, PRECISION)}
