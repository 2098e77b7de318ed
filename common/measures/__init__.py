"""Measures as counts and sums that add up over clients. Who shows them is in `server/`."""
