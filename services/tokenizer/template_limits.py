"""What rendering one chat may take. Real templates take thousandths of it."""

from kvern.services.runtime.bounded_process import MIB, Limits

LIMITS = Limits(cpu_s=1.0, num_bytes=512 * MIB)

MAX_RENDERED_CHARS = 64 * MIB
