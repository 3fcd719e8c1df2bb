// Whether this build has the address sanitizer: tests that it sees what it must are compiled only then.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define BASIN_HAS_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define BASIN_HAS_ADDRESS_SANITIZER 1
#endif
#endif
