"""The engine service: the engine core behind one multiplexed gRPC stream."""

import ctypes
import os
from contextlib import suppress

# Read once, when OpenMP is loaded. Its threads spin while they wait for each other, by default so long that on cores
# shared with anything else, the other services first of all, they take the time from what they wait for. Measured on
# two cores: this many turns cost a step nothing, and with two busy neighbours a small product takes 4 ms instead of 14.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# numba runs on the system's OpenMP, which it knows by this name. torch brings one of its own, and takes it only where
# none is loaded by then: a pool of threads each, of which one spins in the other's way.
with suppress(OSError):
    ctypes.CDLL("libgomp.so.1.0.0")
