"""The command line: options, and what a person sees. The work is in the rooms below."""
