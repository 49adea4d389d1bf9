"""The proof of megabatch: it needs a checkout, imports megabatch, and is never imported by it."""
