"""Peers' control planes on the same workload, each run by the interpreter that has it installed.

``PYTHON -m benchmarks.peers.NAME [--quick]`` prints one JSON object a line: a ``Result`` whose
params name the peer.  The environment is made by ``scripts/peers_venv.sh``.
"""
