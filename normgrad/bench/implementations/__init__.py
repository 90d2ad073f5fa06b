"""Those who are measured: normgrad, other libraries, and the memory itself."""
