"""The process that holds vLLM: a warden, the loop, the adapter of vLLM's releases. Only `core` and `worker` import vllm."""
