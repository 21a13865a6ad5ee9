"""Who calls a router, and what callers may do."""
