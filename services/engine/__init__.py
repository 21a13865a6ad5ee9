"""The engine service: the engine core behind one multiplexed gRPC stream."""

import os

# Read once, when OpenMP is loaded. Its threads spin while they wait for each other, by default so long that on cores
# shared with anything else, the other services first of all, they take the time from what they wait for. Measured on
# two cores: this many turns cost a step nothing, and with two busy neighbours a small product takes 4 ms instead of 14.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
