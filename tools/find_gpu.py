#!/usr/bin/env python3
"""Succeeds where a GPU of compute capability 9.0 is there for CUDA; else says what is missing. Asks the driver alone."""
import argparse
import ctypes
import sys


def devices():
    """Compute capabilities of the devices, as texts. Raises OSError with a reason when there is no driver."""
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuInit(0)
    if status != 0:
        raise OSError(f"the CUDA driver cannot start (error {status})")
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    found = []
    for ordinal in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # .._MINOR
        found.append(f"{major.value}.{minor.value}")
    return found


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    try:
        found = devices()
    except OSError as error:
        found, why = [], str(error)
    else:
        why = f"the devices here have compute capability {', '.join(found)}" if found else "no device"
    if "9.0" in found:
        print(f"gpu: {len(found)} devices, compute capability {', '.join(found)}")
        return 0
    print(f"error: no GPU that the kernels run on: {why}", file=sys.stderr)
    print("hint: they are for compute capability 9.0 (H100, H200); CUDA_VISIBLE_DEVICES may hide one", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
