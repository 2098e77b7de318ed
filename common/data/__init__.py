"""Raw sources, environments, partitions, and the named scenarios made of them."""
