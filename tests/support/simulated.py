"""Invented input of the simulator: profiles and core costs."""

from collections.abc import Sequence

from megabatch.simulate.cores import CoreCosts
from megabatch.simulate.profile import Profile, ProfiledGradient, ProfilePoint

COSTS = CoreCosts(
    ring_s_per_byte=0.8e-9,
    exchange_s_per_byte=1.2e-9,
    exchange_16_s_per_byte=1.7e-9,
    memory_s_per_byte=0.4e-9,
    step_s=3e-4,
    memory_step_s=2e-5,
    wire_share=0.95,
    exchange_gaps=0.5,
    unhidden=0.1,
    leaders_unhidden=0.15,
    exchange_unhidden=0.3,
)


def made_up_profile(
    model: str,
    image_size: int,
    num_classes: int,
    microbatches: Sequence[int],
    image_s: tuple[float, float, float],  # per image: forward, backward, time until the only gradient is ready
    num_elements: int,
    update_s: float,
) -> Profile:
    forward_s, backward_s, ready_s = image_s
    points = [
        ProfilePoint(
            microbatch=b,
            forward_s=b * forward_s,
            backward_s=b * backward_s,
            forward_by_layer_s={},
            ready_s=[b * ready_s],
        )
        for b in microbatches
    ]
    return Profile(
        model=model,
        image_size=image_size,
        num_classes=num_classes,
        precision="fp32",
        device="made up",
        threads=1,
        gradients=[ProfiledGradient(name="fc.weight", num_elements=num_elements, dtype="fp32")],
        points=points,
        update_s=update_s,
    )
