"""A microbatch as one launch: forward and backward in a CUDA graph (`model.cuda_graphs`).

ResNet-50 launches about 1,000 kernels per microbatch.  With small microbatches the host takes longer to launch them
than the GPU to run them.  A graph records the kernels once, and `replay` launches all of them together.

Only microbatches before the last one of a step are in the graph: their gradients stay on this rank.  The last one runs
as usual, so that DDP's hook starts each all-reduce as soon as its gradients are ready.

A graph reads and writes the same memory in each replay.  So a microbatch is copied into fixed tensors, and its
gradients are added to those of the step outside the graph, because DDP may move those.  BatchNorm's momentum would
be a constant of the graph, so the running statistics are also updated outside (training/batch_norm.py).  Dropout reads
the seed that was set before each replay.

Autograd adds a gradient on the stream on which its parameter was first used, which is not the stream of the capture.
So the graph computes gradients of other tensors, which share the parameters' memory.

On a CPU the same computation runs without a graph, so the numerics of a recipe do not depend on the device.
"""

from collections.abc import Callable

import torch
from torch.func import functional_call

from megabatch.config.loading import print_to_stderr
from megabatch.data.pipeline.mix import Mix
from megabatch.errors import UserError
from megabatch.torch_api import foreach_add_
from megabatch.training.parts import Parts
from megabatch.training.step_metrics import microbatch_result

WARM_UPS = 2  # passes before the capture: libraries select algorithms and allocate


class GraphedMicrobatch:
    """Forward and backward of a microbatch of fixed shape, without an all-reduce."""

    def __init__(self, parts: Parts, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.parts, self.device = parts, parts.world.device
        self.images, self.labels = (tensor.to(self.device, copy=True) for tensor in (images, labels))
        self.mix = parts.mixing(0, 0, *images.shape[2:])
        trained = {name: p for name, p in parts.network.named_parameters() if p.requires_grad}
        self.parameters = list(trained.values())
        self.aliases = {name: p.detach().requires_grad_() for name, p in trained.items()}
        self.result, self.gradients = torch.zeros(2, device=self.device), list[torch.Tensor]()
        self.replay: Callable[[], object] = self.compute
        if self.device.type != "cpu":
            self.capture()

    def capture(self) -> None:
        stream, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()
        buffers = [buffer.clone() for buffer in self.parts.network.buffers()]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    self.compute()
            # Other threads, which read images or watch collectives, may use the device during the capture.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.compute()
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(
                f"model.cuda_graphs=true: torch cannot capture forward and backward ({reason}); omit it, or replace "
                "the operation that waits for the device"
            ) from error
        torch.cuda.current_stream(self.device).wait_stream(stream)
        for buffer, before in zip(self.parts.network.buffers(), buffers, strict=True):
            buffer.copy_(before)
        self.replay = graph.replay

    def compute(self) -> None:
        parts = self.parts
        parts.statistics.shares = []  # they are updated outside
        logits = functional_call(parts.network, self.aliases, (parts.normalise(self.images, self.mix),))
        targets = parts.targets(self.labels, logits, self.mix)
        loss = parts.summed_loss(logits, targets) / parts.plan.global_batch
        self.gradients = list(torch.autograd.grad(parts.loss_scale.scaled(loss), list(self.aliases.values())))
        self.result = microbatch_result(loss, logits, targets)

    def run(self, images: torch.Tensor, labels: torch.Tensor, mix: Mix | None) -> torch.Tensor:
        """Add the gradients of a microbatch to those of the step, and return its result."""
        assert images.shape == self.images.shape, "a graph has one shape"
        self.images.copy_(images)
        self.labels.copy_(labels)
        if mix and self.mix:
            self.mix.weights.copy_(mix.weights)
            self.mix.share.copy_(mix.share)
        shares = self.parts.statistics.shares
        self.replay()
        self.parts.statistics.shares = shares
        self.parts.statistics.update()
        with torch.no_grad():
            foreach_add_([p.grad for p in self.parameters if p.grad is not None], self.gradients)
        return self.result.clone()


def make_graph(
    parts: Parts, images: torch.Tensor, labels: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor, Mix | None], torch.Tensor] | None:
    """Return `GraphedMicrobatch.run` for a run with `model.cuda_graphs`, or None if no microbatch could use it."""
    if parts.plan.accumulation == 1:
        if parts.world.rank == 0:
            print_to_stderr(
                "model.cuda_graphs=true has no effect: each rank has one microbatch per step, which is all-reduced; "
                "decrease batch.micro or omit the setting"
            )
        return None
    parts.statistics.update_outside_graph(parts.network)
    return GraphedMicrobatch(parts, images, labels).run
