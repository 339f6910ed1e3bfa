"""The phases of one request, from the complete client body to the rewritten decode request."""
