"""Peers side by side: `megabatch bench NAME` runs the file of that name, from a checkout."""
