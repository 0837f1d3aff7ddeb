"""Training with PyTorch's FSDP2 and Hugging Face models; gloo on CPU, nccl on CUDA, one code path."""
