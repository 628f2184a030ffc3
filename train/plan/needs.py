"""What each strategy holds on the GPU that holds the most: what was counted of the model, divided by plain formulas."""

from dataclasses import dataclass, replace

from train.combinations import Pipelines, tensor_parallel_of
from train.models import gpt
from train.options import Options
from train.plan.hardware import GIB
from train.plan.memory import Subject

WEIGHT = 4
"""Bytes of a weight and of its gradient: fp32 under every strategy; bf16 is for computing."""

CONTEXT, COMMUNICATION = GIB, GIB // 2
"""Allowances, not measured: for CUDA's context and the libraries' workspaces; for NCCL's buffers."""

FRAGMENTS = 0.05
"""The share of what is held that the allocator loses between pieces, by allowance too."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes on one GPU.

    Attributes:
        activations: the most that a micro-batch holds, with logits, and weights cast for computing.
        working: gathered layers, gradients on their way, and buffers.
        allowance: for what can't be counted.
        moments: of the optimizer, and the moving average.
        host: held in the memory of the host instead.
    """

    weights: float
    gradients: float
    moments: float
    activations: float
    working: float = 0
    allowance: float = 0
    host: float = 0

    @property
    def total(self) -> float:
        """All of it, on the GPU."""
        return self.weights + self.gradients + self.moments + self.activations + self.working + self.allowance

    def with_allowance(self, num_gpus: int) -> "Need":
        """The same, with what can't be counted."""
        fixed = CONTEXT + (COMMUNICATION if num_gpus > 1 else 0)
        return replace(self, allowance=fixed + FRAGMENTS * self.total)


def need(subject: Subject, strategy: str, options: Options, num_gpus: int) -> Need:
    """What `strategy` with `options`, which go together, holds on each of `num_gpus`."""
    if strategy == "pipeline" and num_gpus > 1:
        plan = Pipelines.of(options, num_gpus)
        found = max((of_line(subject, options, plan, place) for place in range(plan.size)), key=lambda one: one.total)
    elif strategy in ("fsdp", "tp") and num_gpus > 1:
        found = of_shards(subject, strategy, options, num_gpus)
    else:
        found = of_replica(subject, options, num_gpus)
    return found.with_allowance(num_gpus)


def of_replica(subject: Subject, options: Options, num_gpus: int) -> Need:
    """A whole model on each GPU; reduced in place, since gradients are views of their buckets."""
    whole = WEIGHT * subject.num_weights
    owners = num_gpus if options.zero1 else 1
    return Need(
        weights=whole,
        gradients=whole,
        moments=(subject.moment / owners + subject.average) * subject.num_weights,
        activations=subject.footprint(options.batch_size, options.activation_checkpoint, 1, False).peak,
    )


def of_shards(subject: Subject, strategy: str, options: Options, num_gpus: int) -> Need:
    """A part of each weight on each GPU, and the layers that are gathered for computing."""
    tensor = tensor_parallel_of(options, num_gpus) if strategy == "tp" else 1
    shards = num_gpus // tensor // (options.replicate if strategy == "fsdp" else 1)
    is_sharded = strategy == "fsdp" or shards > 1
    low = subject.low and is_sharded
    # Norms are whole on each rank of a group.
    own = (subject.num_weights - subject.num_norms) / tensor + subject.num_norms
    kept = subject.moment + subject.average
    held = own / shards * (WEIGHT + WEIGHT + kept)
    on_host = options.cpu_offload and strategy == "fsdp"
    working = 0.0
    if is_sharded:
        working = gathered(subject, low=low, accumulates=options.accumulate > 1) / tensor
    return Need(
        weights=0 if on_host else WEIGHT * own / shards,
        gradients=0 if on_host else WEIGHT * own / shards,
        moments=0 if on_host else kept * own / shards,
        activations=subject.footprint(options.batch_size, options.activation_checkpoint, tensor, low).peak,
        working=working,
        host=held if on_host else 0,
    )


def gathered(subject: Subject, *, low: bool, accumulates: bool) -> float:
    """What fully_shard holds beside its shards while activations are at their most.

    That is: the ends of the model, which stay gathered, and their gradients; the layer that computes, the next one,
    the buffer in which that arrives, and a layer's gradients, once as computed and once as they are added up. When
    micro-batches are accumulated, gradients stay whole until the last.
    """
    computed = 2 if low else WEIGHT
    added = WEIGHT if subject.is_gpu else 2 * WEIGHT
    ends, layer = subject.root, subject.largest_unit
    whole = added * subject.num_weights if accumulates else 0
    return computed * (2 * ends + 4 * layer) + added * layer + whole


def in_flight(schedule: str, plan: Pipelines, place: int) -> float:
    """Micro-batches that the rank at `place` in a line has begun and not gone back through, at most.

    They are those of the schedules' warm-up (torch.distributed.pipelining.schedules), in parts of a rank's layers.
    """
    behind = plan.size - 1 - place
    if schedule == "gpipe":
        return plan.num_parts
    if schedule == "1f1b":
        return min(plan.num_parts, behind + 1)
    a_round = plan.num_parts // max(1, plan.num_parts // plan.size)
    begun = (plan.stages_each - 1) * a_round + 2 * behind + 1
    if schedule == "zero-bubble":
        begun += 2 * place  # of so many the gradients of weights are put off, and what they are made of stays
    return min(plan.num_parts, begun / plan.stages_each)


def of_line(subject: Subject, options: Options, plan: Pipelines, place: int) -> Need:
    """Some layers, all of them whole, on the rank at `place` in a line; lines average their gradients."""
    assert subject.shape is not None
    size = options.batch_size // plan.num_parts
    in_stream = WEIGHT * size * subject.size * subject.shape.dim  # bytes that go from stage to stage
    flight = in_flight(options.schedule, plan, place)
    weights = held = copies = buffers = extra = scores = 0.0
    for number in range(place, plan.num_stages, plan.size):
        stage = gpt.stage_of(subject.shape, number, plan.num_stages)
        layers = len(stage.layers)
        weights += layers * subject.largest_unit + (stage.first + stage.last) * subject.num_classes * subject.shape.dim
        weights += stage.last * subject.shape.dim
        one = subject.stage(size, options.activation_checkpoint, layers, stage.first, stage.last)
        copies += one.copies
        held += one.kept - one.copies
        extra = max(extra, one.peak - one.kept)
        # What comes in, forth and back, has a place for each micro-batch from the start.
        buffers += (0 if stage.first else plan.num_parts - flight) * in_stream
        buffers += (0 if stage.last else plan.num_parts) * in_stream
        if stage.last:
            scores = (2 if subject.bf16 else WEIGHT) * size * subject.size * subject.num_classes
            buffers += (plan.num_parts - flight) * scores
    activations = flight * held + copies + extra
    # On CPUs gradients are held in double precision.
    buffers += 0 if subject.is_gpu else 2 * WEIGHT * weights
    # At the end, without activations, the scores of all micro-batches are copied together; later all gradients are, to
    # be added up over the lines.
    end = max(2 * plan.num_parts * scores, (1 if subject.is_gpu else 4) * WEIGHT * weights)
    return Need(
        weights=WEIGHT * weights,
        gradients=WEIGHT * weights,
        moments=(subject.moment + subject.average) * weights,
        activations=activations,
        working=max(buffers, end - activations),
    )
