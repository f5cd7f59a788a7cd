/* calls.c - how often was each function called, and which call shall fail? A table by name, under one lock. */
#include "stub.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char name[48];
    int calls, fails_at, code; /* fails_at of 0: each call, unless the code is 0 */
} table[96];

static int row_of(const char *name)
{
    int i = 0;
    while (table[i].name[0] && strcmp(table[i].name, name) != 0)
        i++;
    snprintf(table[i].name, sizeof table[i].name, "%s", name);
    return i;
}

void stub_fail(const char *name, int nth, int code)
{
    pthread_mutex_lock(&lock);
    int row = row_of(name);
    table[row].fails_at = nth ? table[row].calls + nth : 0;
    table[row].code = code;
    pthread_mutex_unlock(&lock);
}

int stub_calls(const char *name)
{
    pthread_mutex_lock(&lock);
    int calls = table[row_of(name)].calls;
    pthread_mutex_unlock(&lock);
    return calls;
}

void stub_count(const char *name, int more)
{
    pthread_mutex_lock(&lock);
    table[row_of(name)].calls += more;
    pthread_mutex_unlock(&lock);
}

int stub_called(const char *name)
{
    pthread_mutex_lock(&lock);
    int row = row_of(name);
    bool fails = ++table[row].calls == table[row].fails_at || table[row].fails_at == 0;
    int code = fails ? table[row].code : 0;
    pthread_mutex_unlock(&lock);
    return code;
}
