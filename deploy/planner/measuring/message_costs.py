"""What a block for a target elsewhere costs beside the link and the pass, timed over a loopback.

A host that waits for blocks is asleep in between, and the weights have left its caches: what its
rounds cost when they follow one another is not all.
"""

import secrets
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from polybasic.deploy.planner.measuring.measurements import PassCosts
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.remote.keys import identity_of
from polybasic.deploy.runtime.remote.link import Link
from polybasic.deploy.runtime.remote.server import TargetServer, listening_at
from polybasic.deploy.runtime.remote.session import Session
from polybasic.deploy.runtime.remote.target import Address, RemoteTarget
from polybasic.deploy.runtime.rounds.sampling import Sampling

NUM_BLOCKS = 20
MAX_PAUSE_SECONDS = 0.05


def message_seconds(chain: Chain, prompt: list[int], costs: PassCosts, link: Link) -> float:
    """Median seconds of empty blocks beyond those of their passes, at least 0.

    Args:
        chain: its target is served in this process.
        prompt: that the blocks follow.
        costs: of the target's passes where they follow one another.
        link: whose round trip lies between an answer and the next block.
    """
    seconds: list[float] = []
    with _served(chain) as target:
        session = Session(target)
        session.begin(list(prompt), len(prompt), Sampling(), None)
        for _ in range(min(NUM_BLOCKS, chain.engine.context_tokens - len(prompt))):
            time.sleep(min(link.round_trip_seconds, MAX_PAUSE_SECONDS))
            began = time.perf_counter()
            session.send(session.tokens[-1:])
            session.tokens.append(session.verdict().next_token)
            seconds.append(time.perf_counter() - began)
        session.end()
        target.close()
    return max(statistics.median(seconds[1:]) - costs.at(1), 0.0)  # the first one reads the prompt


@contextmanager
def _served(chain: Chain) -> Iterator[RemoteTarget]:
    listening, key = listening_at("127.0.0.1:0"), secrets.token_bytes(32)
    server = TargetServer(chain, key, listening)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        name, vocab_size = chain.manifest.members[0].name, chain.engine.models.vocab_size
        host, port = listening.getsockname()
        address = Address(host, port, key)
        yield RemoteTarget(name, vocab_size, identity_of(chain.manifest), address)
    finally:
        server.close()
        thread.join()
