/* check.h - the one assertion of the C tests: says where, what and with which values, then ends the test. */
#ifndef HVD_TESTS_CHECK_H
#define HVD_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition, ...)                                                             \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "%s:%d: %s does not hold: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                                 \
            fputc('\n', stderr);                                                          \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

#define SKIP(...)            \
    do {                     \
        printf(__VA_ARGS__); \
        putchar('\n');       \
        exit(77);            \
    } while (0)

#endif
