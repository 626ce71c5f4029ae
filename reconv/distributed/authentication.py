"""Proof that every rank knows the secret of the run: in the store before ranks connect, and over their connections.

Each rank sends a random challenge and an HMAC of all challenges with its rank, so that no answer can be repeated, made
up or sent by another rank. In the store (`liveness`) a stranger is refused before gloo connects to it. Over gloo the
proof is repeated, because whoever can write to the store can redirect connections. Nothing but bytes of a fixed length
is received before all answers are right.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import sys

import torch
import torch.distributed as dist

from reconv.core.errors import RankLostError
from reconv.distributed.environment import SECRET_VARIABLE, LaunchEnv
from reconv.distributed.rank_store import Signer, new_secret

NONCE_BYTES = 32
_KNOWS, _DOES_NOT_KNOW = b"\1", b"\0"
NOT_AUTHENTICATED = (
    f"note: the ranks are not authenticated, since {SECRET_VARIABLE} is not set: whoever reaches their ports can take "
    f"the place of one. Set it to the same random text for all of them: export {SECRET_VARIABLE}=..."
)


def authenticate(launch_env: LaunchEnv) -> tuple[str, bool]:
    """A secret of these connections, and whether the ranks have proved theirs; called by every rank.

    Raises RankLostError if a rank does not prove it. If no rank has a secret, rank 0 makes one, and says so
    if there are several machines.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    own = (_KNOWS if secret else _DOES_NOT_KNOW) + secrets.token_bytes(NONCE_BYTES)
    hellos = _all_gather(own)
    transcript = hashlib.sha256(b"".join([b"connections", *hellos])).hexdigest()
    # Without a secret the answer says nothing; it is sent so that every rank makes the same calls.
    sent = prove(secret or secrets.token_hex(NONCE_BYTES), transcript, launch_env.rank)
    answers = _all_gather(bytes.fromhex(sent))
    if hellos[launch_env.rank] != own:
        raise refused(launch_env, [], "the challenge of this rank was changed on its way")
    knowing = [rank for rank, hello in enumerate(hellos) if hello[:1] == _KNOWS]
    if not secret and knowing:
        raise secret_missing(launch_env, knowing)
    if secret:
        wrong = [r for r, answer in enumerate(answers) if not is_proof(secret, transcript, r, answer.hex())]
        if wrong:
            raise refused(launch_env, wrong)
        # Not the secret itself: heartbeats and errors of an earlier round, or of another run, would count here too.
        return Signer(secret).derive(f"messages of {transcript}").secret, True
    if launch_env.rank == 0 and launch_env.num_nodes > 1:  # else they listen on the loopback interface alone
        print(NOT_AUTHENTICATED, file=sys.stderr, flush=True)
    return _share_secret(), False


def prove(secret: str, transcript: str, rank: int) -> str:
    """The answer of a rank to the challenges that a transcript is the digest of."""
    return hmac.new(secret.encode(), f"rank {rank} of {transcript}".encode(), hashlib.sha256).hexdigest()


def is_proof(secret: str, transcript: str, rank: int, answer: str) -> bool:
    """True if an answer could only be given by a holder of the secret."""
    return hmac.compare_digest(answer.encode(errors="replace"), prove(secret, transcript, rank).encode())


def _all_gather(content: bytes) -> list[bytes]:
    sent = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    parts = [torch.zeros_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, sent)
    return [bytes(part.numpy()) for part in parts]


def _share_secret() -> str:
    """A secret of rank 0, sent over the connections between the ranks and not through the store."""
    secret = torch.frombuffer(bytearray(new_secret().encode()), dtype=torch.uint8)
    dist.broadcast(secret, 0)
    return bytes(secret.numpy()).hex()


def secret_missing(launch_env: LaunchEnv, knowing: list[int]) -> RankLostError:
    """The error of a rank without the secret that others have."""
    why = f"{_name(knowing)} requires {SECRET_VARIABLE}, and it is not set here"
    return refused(launch_env, [launch_env.rank], why)


def refused(launch_env: LaunchEnv, ranks: list[int], why: str = "") -> RankLostError:
    """The error that ends this rank when others are not who they say they are."""
    why = why or f"{SECRET_VARIABLE} is not set there or differs, or it is no rank of this run"
    return RankLostError(
        f"{_name(ranks)} did not prove that it knows the secret of this run" if ranks else "a rank was refused",
        where=f"rank {launch_env.rank} of {launch_env.world_size}, started by {launch_env.launcher}",
        why=why,
        hint=f"set {SECRET_VARIABLE} to the same text for all ranks, and let only their machines reach each other",
    )


def _name(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
