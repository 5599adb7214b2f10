"""One extension module for every Python from 3.10 on."""

from setuptools import Extension, setup

extension = Extension(
    "cubin_runtime_accelerator",
    ["module.c", "sender.c", "walk.c", "paths.c", "forms.c", "history.c"],
    depends=["sender.h"],
    py_limited_api=True,
    extra_compile_args=["-O2", "-Wall"],
)
setup(ext_modules=[extension], packages=[], options={"bdist_wheel": {"py_limited_api": "cp310"}})
