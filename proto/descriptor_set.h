/* descriptor_set.h - every .proto of this folder as one serialised FileDescriptorSet, made by
 * the build; reflection serves it. */
#ifndef TD_PROTO_DESCRIPTOR_SET_H
#define TD_PROTO_DESCRIPTOR_SET_H

#include <stddef.h>

extern const unsigned char td_proto_descriptor_set[];
extern const size_t td_proto_descriptor_set_bytes;

#endif
