package kvsidecar;

import com.google.protobuf.Descriptors.FieldDescriptor;
import com.google.protobuf.Message;
import java.util.List;
import java.util.Map;
import java.util.Set;

/** Allowed values of a request's fields. */
final class Numbers {
    private static final Set<String> POSITIVE = Set.of("max_tokens", "ttl_seconds", "retain_seconds");

    private Numbers() {}

    /**
     * Refuses negative numbers in unsigned fields, which Java stores as int. The worker would read -3 as 4294967293. A
     * max_tokens of {@link Client#REST_OF_CONTEXT} is allowed.
     *
     * @throws KVSidecarException with reason INVALID_REQUEST
     */
    static void refuseNegative(Message message) {
        for (Map.Entry<FieldDescriptor, Object> set : message.getAllFields().entrySet()) {
            FieldDescriptor field = set.getKey();
            if (field.isMapField()) {
                continue;
            }
            for (Object value : field.isRepeated() ? (List<?>) set.getValue() : List.of(set.getValue())) {
                if (field.getType() == FieldDescriptor.Type.MESSAGE) {
                    refuseNegative((Message) value);
                } else if (field.getType() == FieldDescriptor.Type.UINT32) {
                    refuseNegative(field.getName(), (Integer) value);
                }
            }
        }
    }

    private static void refuseNegative(String name, int value) {
        if (value >= 0 || (name.equals("max_tokens") && value == Client.REST_OF_CONTEXT)) {
            return;
        }
        int least = POSITIVE.contains(name) ? 1 : 0;
        throw KVSidecarException.refusal(String.format("%s is %d; whole numbers from %d to %d are allowed",
                name, value, least, Integer.MAX_VALUE));
    }
}
