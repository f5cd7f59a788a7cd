/* adasum.c - from the dots of n arrays to the coefficients with which Adasum adds them.
 *
 * How are gradients combined so that parallel ones are averaged and orthogonal ones added? Two of them as
 *
 *     pair(a, b) = (1 - a.b / (2 |a|^2)) a  +  (1 - a.b / (2 |b|^2)) b        (a zero array takes no part: factor 1)
 *
 * and n of them in a tree: ranks (0,1), (2,3), ..., then those pairs in pairs, an odd one carried up as it is. Every
 * node of the tree is a linear combination of the arrays below it, and the dot of two such nodes follows from the
 * dots of the arrays. So the whole tree needs nothing but the Gram matrix, and no array has to move more than once:
 * for a tree over tensors of any length and any number of ranks there is one sum in the end.
 *
 * What a Gram matrix cannot tell: a node that is a difference of almost equal arrays, smaller than about a millionth of
 * them, drowns in the rounding of the dots (float64). Such a node counts as zero, so that a quotient of two rounding
 * errors never becomes a coefficient. Squares that overflow or vanish in float64 (elements beyond 1e154 or below
 * 1e-162) give NaN and a plain sum. NaN and infinities make the whole tensor NaN on all ranks.
 */
#include "adasum.h"

#include <math.h>

#define NOTHING 1e-13 /* of the sum of the magnitudes that a square was added from */

const char *hvd_adasum_check(int dtype)
{
    if (hvd_is_float(dtype))
        return NULL;
    return "Adasum is defined for float16, bfloat16, float8, float32 and float64: cast the tensor to float32, or use "
           "sum";
}

/* A node's arrays are [begin, end). */
struct node {
    int begin, end;
};

/* a.b of two nodes, and the sum of the magnitudes of its terms. */
static double dot(const double *gram, const double *coefficient, struct node a, struct node b, double *magnitude)
{
    double sum = 0;
    *magnitude = 0;
    for (int i = a.begin; i < a.end; i++)
        for (int j = b.begin; j < b.end; j++) {
            double term = coefficient[i] * coefficient[j] * gram[i > j ? HVD_GRAM_AT(i, j) : HVD_GRAM_AT(j, i)];
            sum += term;
            *magnitude += fabs(term);
        }
    return sum;
}

static double factor(const double *gram, const double *coefficient, struct node node, double with_other)
{
    double magnitude, square = dot(gram, coefficient, node, node, &magnitude);
    return square <= NOTHING * magnitude ? 1.0 : 1.0 - with_other / (2.0 * square); /* NaN goes on as NaN */
}

void hvd_adasum_coefficients(const double *gram, int n, double *coefficient)
{
    for (int i = 0; i < n; i++)
        coefficient[i] = 1.0;
    for (int width = 1; width < n; width *= 2)
        for (int begin = 0; begin + width < n; begin += 2 * width) {
            int end = begin + 2 * width < n ? begin + 2 * width : n;
            struct node a = {begin, begin + width}, b = {begin + width, end};
            double magnitude, with_other = dot(gram, coefficient, a, b, &magnitude);
            double of_a = factor(gram, coefficient, a, with_other), of_b = factor(gram, coefficient, b, with_other);
            for (int i = a.begin; i < b.end; i++)
                coefficient[i] *= i < a.end ? of_a : of_b;
        }
}
