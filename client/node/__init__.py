"""The processes of a site: joining, the SuperNode, the executor that answers, policy and audit. No training of its own."""
