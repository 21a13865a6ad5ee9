"""What compiling one constraint may take. A wide schema takes half a second. The thread of the engine's that compiles
has twice the stack."""

from kvern.services.runtime.bounded_process import MIB, Limits

LIMITS = Limits(cpu_s=2.0, num_bytes=512 * MIB, stack_bytes=4 * MIB, niceness=10)

QUICK_S = 0.1
"""Of processor time, in which nearly all constraints are compiled: others wait for each other alone."""
