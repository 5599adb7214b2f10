"""One launch captured in a graph and replayed over other content."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cubin_runtime.launch.driver import Driver


def replay_over(driver: Driver, device: Any, contents: Iterable[Any]) -> None:
    """Capture a launch of a case on the device, then load each content, replay and compare the result with it."""
    stream = driver.create_stream(blocking=True)
    workspace = device.dirty_workspace()
    device.plan.preload()
    driver.begin_capture(stream)
    device.run(stream, workspace)
    graph = driver.instantiate(driver.end_capture(stream))
    for content in contents:
        device.load(content)
        device.poison()
        driver.synchronize(0)
        driver.launch_graph(graph, stream)
        driver.synchronize(stream)
        device.assert_right()
        device.plan.check(workspace, stream)
    driver.destroy_executable(graph)
