"""An engine worker in a process of its own, for tests of the direct path: it says what it received, one line each.

python tests/rl/weights_peer.py OFFER_JSON REPLICA [BEHAVIOUR]
"""

import json
import sys
import time

import torch

from runtime.rl.types import WeightsRef
from runtime.rl.weights.channel import ChannelMember, ChannelOffer
from runtime.rl.weights.layout import fingerprint_of
from runtime.rl.weights.receiver import WeightsReceiver


def main() -> None:
    offer = ChannelOffer(**json.loads(sys.argv[1]))
    receiver = WeightsReceiver(offer, ChannelMember(replica=sys.argv[2], epoch=1), device=torch.device("cpu"))
    print("up", flush=True)
    seen = None
    while True:
        got = receiver.received
        if got is None or got == seen:
            time.sleep(0.005)
            continue
        seen = got
        ref = WeightsRef(lineage=got.lineage, version=got.version, path="", digest=got.digest)
        with receiver.taken(ref) as taken:
            assert taken is not None
            flat = receiver._flat
            assert flat is not None
            mine = fingerprint_of(got.layout, flat, lineage=got.lineage, version=got.version)
        print(json.dumps({"version": got.version, "digest": mine, "names": len(taken.tensors)}), flush=True)


if __name__ == "__main__":
    main()
