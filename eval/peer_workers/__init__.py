"""Peers, each in a process of its own: ``python -m eval.peer_workers NAME``, JSON lines on its pipes (protocol.py).

These files also run where nothing of ours is installed: in the environment of a peer whose dependencies collide with
ours, by path. So they import neither calm nor each other absolutely; ``ours`` alone does, and runs in our environment.
"""
