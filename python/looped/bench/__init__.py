"""How long loops take: shapes by name, interleaved rounds, loop count against latency."""
