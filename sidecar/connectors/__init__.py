"""How encoder output (EC) and KV cache travel between engines: parameters only, no IO."""
