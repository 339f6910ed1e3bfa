"""Access-log record, logging, metrics and timing."""
