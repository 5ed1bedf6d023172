"""Set before jax is imported: the CPU, quick compiling, no windows, one cache of compiled programs for all processes."""
import os
import tempfile

_compiled = tempfile.TemporaryDirectory(prefix="jaxrl_llm_compiled_")  # removed when the session ends
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiling tiny programs is what takes time
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compiled.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
