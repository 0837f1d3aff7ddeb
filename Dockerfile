# asyncrl with vLLM and Megatron-core for NVIDIA GPUs: driver 580 or newer (CUDA 13), on Linux x86-64.
#   docker build -t asyncrl .
#   docker run --gpus all --shm-size=16g -v $PWD/runs:/asyncrl/runs asyncrl asyncrl-train recipes/gsm8k_qwen.yaml
# The libraries of RDMA: without them NCCL crosses machines by TCP.
# The compiler stays in the image: vLLM and torch compile kernels when a model is loaded.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-dev python3-venv gcc g++ git wget \
    libibverbs1 ibverbs-providers librdmacm1 \
 && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/asyncrl PATH=/opt/asyncrl/bin:$PATH HF_HOME=/models
RUN python3 -m venv $VIRTUAL_ENV

# The packages first: they change seldom and weigh most.
WORKDIR /asyncrl
COPY requirements/gpu-vllm.lock requirements/gpu-vllm.lock
RUN pip install --no-cache-dir --no-deps -r requirements/gpu-vllm.lock

COPY . .
RUN pip install --no-cache-dir --no-deps -e .
CMD ["asyncrl-doctor", "recipes/gsm8k_qwen.yaml"]
