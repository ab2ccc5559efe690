"""Reads the load of this machine by all processes: processor, memory, disks and network."""

import time

import psutil

GIB = 2**30
LOOPBACK = "lo"


class Host:
    """The machine, read repeatedly; rates are means since the last reading."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.before = _counters()
        psutil.cpu_percent()  # its first value is meaningless

    def read(self) -> dict[str, float]:
        """Return percentages, GiB and bytes per second, without values that the system does not count."""
        now, counted, memory = time.monotonic(), _counters(), psutil.virtual_memory()
        seconds = max(now - self.since, 1e-3)
        rates = {
            f"{name}_bytes_per_second": round(max(0, count - self.before[name]) / seconds)
            for name, count in counted.items()
            if name in self.before
        }
        self.since, self.before = now, counted
        used = {"host_memory_gib": round((memory.total - memory.available) / GIB, 3)}
        return {"cpu_utilization": psutil.cpu_percent(), "host_memory_percent": memory.percent, **used, **rates}


def _counters() -> dict[str, int]:
    """Return bytes since the machine was started."""
    disks = psutil.disk_io_counters()  # None in a container that hides them
    networks = [one for name, one in psutil.net_io_counters(pernic=True).items() if name != LOOPBACK]
    found = {"disk_read": disks.read_bytes, "disk_written": disks.write_bytes} if disks else {}
    received, sent = sum(one.bytes_recv for one in networks), sum(one.bytes_sent for one in networks)
    return {**found, "network_received": received, "network_sent": sent}
