"""`reconv rendezvous`: the process over which the nodes of elastic runs find each other."""

from __future__ import annotations

import os
import signal
import threading

import click

from reconv.cli.commands.train import silence_torch
from reconv.cli.options import Command, print_note
from reconv.cluster.elastic_config import parse_endpoint
from reconv.core.stop_signals import handled_stop_signals


@click.command(cls=Command)
@click.argument("address", metavar="HOST:PORT")
def rendezvous(address: str) -> int:
    """Listen on HOST:PORT for the nodes of an elastic run, until Ctrl-C or SIGTERM.

    HOST is an address of this machine that all nodes can reach; nothing listens on any other. It trains nothing and
    writes nothing. Nodes may come and go; this process should stay, so start it where no job ends it.

    \b
    Examples:
      reconv rendezvous 10.0.0.1:29400
    """
    silence_torch()
    from reconv.cluster.node_rendezvous import serve_rendezvous
    from reconv.distributed.environment import SECRET_VARIABLE
    from reconv.distributed.rank_store import new_secret

    host, port = parse_endpoint(address)
    ended = threading.Event()
    for number in handled_stop_signals():
        signal.signal(number, lambda *_: ended.set())
    store = serve_rendezvous(host, port)
    print_note(f"listening on {host}:{store.port}; on every node:")
    if not os.environ.get(SECRET_VARIABLE):
        print_note(f"  export {SECRET_VARIABLE}={new_secret()}")
    print_note(f"  reconv train RECIPE --out /shared/run --elastic 1:4 --rendezvous {host}:{store.port}")
    while not ended.wait(1.0):
        pass
    return 0
