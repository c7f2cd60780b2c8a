"""What trainer and engines say to each other about a direct transfer, in frames of JSON over one connection an engine.

    engine   hello {token, replica, epoch, rank, device_kind, device}          trainer  welcome | refused {why}
    trainer  prepare {lineage, version, layout}                         engine   ready | cannot {why}
    trainer  go {group, rank, world, host, port, new, one_card, deadline_s}   both     broadcasts, bucket after bucket
    engine   received {sums, receive_s} | failed {why}
    trainer  sealed {digest} | drop                                     (sealed: every member has the same sums)
    engine   dropped                                                    (after drop)

A sealed generation lies in the engine's second buffer until flow says that it is published; then the engine swaps.
The trainer's end of a connection that fails anything is closed, and the engine connects anew. Pure values here.
"""

from planner.record import record
from runtime.rl.types import ChannelMember, ChannelOffer

__all__ = ["AGAIN_S", "BUCKET_BYTES", "HELLO_S", "READY_S", "ChannelMember", "ChannelOffer", "Transfer"]

HELLO_S = 10.0  # for the first frame of a connection
READY_S = 20.0  # for an engine to have room for the second buffer, made once
AGAIN_S = 1.0  # before an engine connects again
BUCKET_BYTES = 256 * 2**20


@record
class Transfer:
    """A direct transfer that every member took whole."""

    lineage: int
    version: int
    digest: str
    bytes: int  # sent to each member, padding included
    members: int
    rebuilt: bool  # whether the communicator was made anew
    prepare_s: float  # until every member was ready
    transfer_s: float  # group, broadcasts, checksums
