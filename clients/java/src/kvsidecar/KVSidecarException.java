package kvsidecar;

import com.google.protobuf.Any;
import com.google.protobuf.CodedInputStream;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.io.IOException;

/**
 * A call that failed. The reason is stable and meant for programs, such as "INVALID_REQUEST" or "OVERLOADED"
 * (clients/python/kvsidecar/errors has all reasons). The message is one sentence for people.
 */
public final class KVSidecarException extends RuntimeException {
    private static final long serialVersionUID = 1;
    /** "HTTP/" in hexadecimal: netty reports the bytes that arrived instead of a frame. */
    private static final String HTTP_BEGINS = "485454502f";
    private final Status.Code code;
    private final String reason;
    private final String domain;

    private KVSidecarException(StatusRuntimeException cause, String reason, String domain) {
        super(String.valueOf(cause.getStatus().getDescription()), cause);
        this.code = cause.getStatus().getCode();
        this.reason = reason;
        this.domain = domain;
    }

    public Status.Code code() {
        return code;
    }

    public String reason() {
        return reason;
    }

    public String domain() {
        return domain;
    }

    /** An error of the client itself, without a call. */
    static KVSidecarException refusal(String message) {
        return from(Status.INVALID_ARGUMENT.withDescription(message).asRuntimeException());
    }

    /** Converts the error of a failed call. If an HTTP/1 server answered, the error says so. */
    static KVSidecarException at(String authority, StatusRuntimeException error) {
        for (Throwable cause = error; cause != null; cause = cause.getCause()) {
            if (String.valueOf(cause.getMessage()).contains(HTTP_BEGINS)) {
                return refusal(authority + " is an HTTP address, such as the gateway's; give the HOST and PORT of a worker's gRPC");
            }
        }
        return from(error);
    }

    /** Reads google.rpc.ErrorInfo from a call's status (https://google.aip.dev/193). */
    static KVSidecarException from(StatusRuntimeException error) {
        com.google.rpc.Status status = StatusProto.fromThrowable(error);
        String reason = reasonOf(error.getStatus().getCode());
        String domain = "";
        for (Any detail : status.getDetailsList()) {
            if (detail.getTypeUrl().equals("type.googleapis.com/google.rpc.ErrorInfo")) {
                try {
                    reason = field(detail, 1);
                    domain = field(detail, 2);
                } catch (IOException damaged) {
                    error.addSuppressed(damaged);
                }
            }
        }
        return new KVSidecarException(error, reason, domain);
    }

    /** Reads a text field of ErrorInfo{reason = 1, domain = 2} by its number, because Debian's jar of google.rpc is
       older than that message. */
    private static String field(Any packed, int wanted) throws IOException {
        CodedInputStream in = packed.getValue().newCodedInput();
        for (int tag = in.readTag(); tag != 0; tag = in.readTag()) {
            if (tag == (wanted << 3 | 2)) {
                return in.readStringRequireUtf8();
            }
            in.skipField(tag);
        }
        return "";
    }

    /** Reason of an error without details: such an error comes from gRPC on either side, not from the worker. */
    private static String reasonOf(Status.Code code) {
        switch (code) {
            case CANCELLED:
            case DEADLINE_EXCEEDED:
            case UNAVAILABLE:
                return code.name();
            case INVALID_ARGUMENT:
                return "INVALID_REQUEST";
            default:
                return "INTERNAL";
        }
    }
}
