"""The passes and exchanges of Megatron-Core's two schedules, which wait for their sends and receives.

The schedules are those of megatron-core 0.16.1, pipeline_parallel/schedules.py.
"""

from collections.abc import Sequence
from functools import partial

from holmes_hpc.planning.schedule.kinds import Exchange, Pass, StageTransfer
from holmes_hpc.planning.schedule.order import Order


def program(order: Order, stage: int) -> list[Pass | Exchange]:
    """Return the passes and exchanges of `stage` in order."""
    return (_one_forward_one_backward if order.kind == "1f1b" else _interleaved)(order, stage)


def _sent(order: Order, stage: int, source_pass: Pass) -> tuple[StageTransfer, ...]:
    """Return the transfers that leave `stage` after `source_pass`: one or none."""
    return tuple(t for t in [order.transfer_from(stage, source_pass)] if t)


def _received(order: Order, stage: int, needed: Pass) -> tuple[StageTransfer, ...]:
    """Return the transfers that `stage` receives for pass `needed`: one or none."""
    return tuple(t for t in [order.transfer_to(stage, needed)] if t)


def _one_forward_one_backward(order: Order, stage: int) -> list[Pass | Exchange]:
    """Return the program of Megatron-Core's 1F1B: every pass waits for its input.
    In the steady state, if `order.paired`, a send and the receive of the opposite direction are one exchange."""
    items: list[Pass | Exchange] = []
    count, warm_up = order.micro_batches, min(order.micro_batches, order.stages - stage - 1)
    forward, backward = ([Pass(is_forward, m, 0) for m in range(count)] for is_forward in (True, False))
    sends, receives = partial(_sent, order, stage), partial(_received, order, stage)
    for f in forward[:warm_up]:
        items += [Exchange(receives=receives(f)), f, Exchange(sends=sends(f))]
    if warm_up < count:
        items.append(Exchange(receives=receives(forward[warm_up])))
    for f, b in zip(forward[warm_up:], backward, strict=False):
        below = Exchange(sends(f), receives(b))
        above = Exchange(sends(b), receives(forward[f.micro_batch + 1]) if f.micro_batch + 1 < count else ())
        if order.paired:
            items += [f, below, b, above]
        else:
            items += [f, Exchange(receives=below.receives), Exchange(below.sends), b]
            items += [Exchange(above.sends), Exchange(receives=above.receives)]
    for b in backward[count - warm_up :]:
        items += [Exchange(receives=receives(b)), b, Exchange(sends=sends(b))]
    return [item for item in items if item]


def _interleaved(order: Order, stage: int) -> list[Pass | Exchange]:
    """Return the program of Megatron-Core's interleaved 1F1B. In the steady state with overlap_p2p_comm
    (`order.overlap`), a stage waits for a receive when a pass needs it, and for a send when it posts the next one.
    Otherwise it waits for each exchange."""
    forward = [Pass(True, m, c) for m, c in order.turns()]
    backward = [Pass(False, m, order.chunks - 1 - c) for m, c in order.turns()]
    total, last_stage = len(forward), order.stages - 1
    warm_up = min(total, 2 * (last_stage - stage) + (order.chunks - 1) * order.group)
    sends, receives = partial(_sent, order, stage), partial(_received, order, stage)

    def next_receives(passes: Sequence[Pass], k: int) -> tuple[StageTransfer, ...]:
        """Return the receive of the input of `passes[k + 1]`, which the stage posts after `passes[k]`.
        Empty if there is no such pass, or if no edge carries its input."""
        return receives(passes[k + 1]) if k + 1 < total else ()

    items: list[Pass | Exchange] = [Exchange(receives=receives(forward[0]))]
    for k in range(warm_up):
        items += [forward[k], Exchange(sends(forward[k]), next_receives(forward, k))]
    items.append(Exchange(receives=receives(backward[0]), waits=()))  # the stage waits for it before backward[0]
    previous_sends: dict[bool, tuple[StageTransfer, ...]] = {True: (), False: ()}  # by direction
    for k in range(total - warm_up):
        if not order.overlap:
            f, b = forward[k + warm_up], backward[k]
            items += [
                Exchange(waits=receives(b)),
                f,
                b,
                Exchange(sends(f) + sends(b), next_receives(forward, k + warm_up) + next_receives(backward, k)),
            ]
            continue
        for passes, index in ((forward, k + warm_up), (backward, k)):
            p = passes[index]
            posted = Exchange(sends(p), next_receives(passes, index), waits=previous_sends[p.forward])
            items += [Exchange(waits=receives(p)), p, posted]
            previous_sends[p.forward] = sends(p)
    for k in range(total - warm_up, total):
        b = backward[k]
        items += [Exchange(waits=receives(b)), b, Exchange(sends(b), next_receives(backward, k))]
    return [item for item in items if item]
