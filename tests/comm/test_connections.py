"""What is shut: connections with a peer that were opened for a membership, and nothing else of the process."""

import socket

from paceline.comm import connections


def connection(listener):
    """Both ends."""
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    for end in (one, other):
        end.settimeout(10)
    return one, other


def test_only_connections_of_the_membership_are_shut():
    """Neither those from before, nor spared ones, nor a socket that listens, nor one of this host's files."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as store:
        before = connection(listener)
        spared = connections.connected()
        opened, kept = connection(listener), connection(store)
        local = socket.socketpair()
        chosen = connections.connected() - spared - connections.to_port(store.getsockname()[1])
        assert connections.shut(chosen, spared) == 3  # both ends of one, and the accepting end of the store's
        assert opened[0].recv(1) == b""
        before[0].sendall(b"x")
        assert before[1].recv(1) == b"x"
        local[0].sendall(b"x")
        assert local[1].recv(1) == b"x"
        again = connection(listener)  # it still listens
        for end in (*before, *opened, *kept, *local, *again):
            end.close()


def test_while_a_membership_begins_all_new_connections_are_its_own():
    """Also the one to the store, in which a rank may wait for one that has died."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = connection(listener)
        spared = connections.connected()
        opened = connection(listener)
        assert connections.shut(None, spared) == 2
        assert opened[1].recv(1) == b""
        before[0].sendall(b"x")
        assert before[1].recv(1) == b"x"
        for end in (*before, *opened):
            end.close()
