"""The trtllm-gen kernels that NVIDIA publishes: which one a call launches, how, and with which parameters.

The data's way, a module a step: ``cases`` or ``made_up`` -> ``arguments`` -> ``entries`` (``assembling``,
``carving``) -> ``problem`` -> ``select`` (``kernels``, ``tiles``, ``grid``) -> ``tensor_maps`` -> ``fill``
(``params``) -> ``following`` -> ``plan``; then ``records``, ``bulk`` and ``explanation`` say it. Nothing here
touches a driver: occupancy is a callback, descriptors stay specs.
"""
