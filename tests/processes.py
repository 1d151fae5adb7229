"Programs that are stopped while they train."
import signal
import time

def stopped(process, metrics, number):
    "What a process printed, out and err, that got a signal once `metrics` had three rows."
    deadline = time.time() + 120
    while process.poll() is None and time.time() < deadline and not (
        metrics.exists() and metrics.read_bytes().count(b"\n") > 3):
        time.sleep(0.005)
    process.send_signal(getattr(signal, number))
    return process.communicate(timeout=120)
