"""The benchmark of layers: one network with each kind of layer on all sets of tables with real axes, under one protocol.

`models`: the networks and their budgets. `protocol`: samples, rates, trainings, the grid. `reading`: what the rows answer.
"""
