"""The engine service: the engine core behind one multiplexed gRPC stream."""

import os

# Read once, when torch loads OpenMP. Its threads spin while they wait for each other, and on a machine whose cores they
# share with anything else, the other services first of all, that is time taken from what they wait for: with two busy
# neighbours on two cores a small product took 8 ms instead of 1.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
