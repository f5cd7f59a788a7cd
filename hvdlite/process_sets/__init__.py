"""Process sets, which other libraries call process groups or communicators, and meshes of them."""
