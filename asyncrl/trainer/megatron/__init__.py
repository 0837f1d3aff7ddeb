"""Training with Megatron-core: tensor, sequence, pipeline and expert parallelism; nccl on CUDA, gloo on CPU."""
