"""Many runs: searches, comparisons, sites that nobody trained on. The papers' tables are in `server/papers/`."""
