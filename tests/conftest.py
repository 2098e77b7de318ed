import torch

# As in every process of the system: two threads that share a core with other workers are many times slower.
torch.set_num_threads(1)
