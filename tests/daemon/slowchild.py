"""A planner process that says how far it got and never ends: `slowchild.py INCUMBENTS FD`."""

import subprocess
import sys
from multiprocessing.connection import Connection

from simworld import toy_solve

from planner.solution import Feasible
from runtime.planning.message import Incumbent, Ready

connection = Connection(int(sys.argv[2]))
ask = connection.recv()
solver = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
connection.send(Ready())
solution = toy_solve(ask.problem)
assert isinstance(solution, Feasible)
for _ in range(int(sys.argv[1])):
    connection.send(Incumbent(feasible=solution))
solver.wait()
