"""Media entries, placeholder spans, metadata and content parts; no IO."""
